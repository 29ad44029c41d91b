return text('fingerprint')
