accept({})
return text('fingerprint')
