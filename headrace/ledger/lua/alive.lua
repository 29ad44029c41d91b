accept({})
-- Heartbeat of a service that owns no samples: it makes `writes` grow.
call('HSET', META, 'alive', now())
return { 'ok' }
