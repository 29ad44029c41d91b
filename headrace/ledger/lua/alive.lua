accept({})
-- A sign of life of a service that owns no samples: `writes` grows by it.
call('HSET', META, 'alive', now())
return { 'ok' }
