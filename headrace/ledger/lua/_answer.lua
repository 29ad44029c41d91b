local reply = operation()
if type(reply) == 'table' and reply.err then return reply end
if wrote then bump('writes') end
if not KNOWN then return reply end
return { marks(), reply or false }
