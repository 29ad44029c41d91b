accept({})
return call('HGETALL', key('beats'))
