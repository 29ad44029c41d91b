accept({})
local version = text('val:version')
return { version, call('HLEN', key('val:rows')), call('HLEN', key('val:results:' .. version)), text('val:open') }
