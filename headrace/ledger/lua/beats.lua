return call('HGETALL', key('beats'))
