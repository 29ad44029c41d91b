return call('HINCRBY', key('beats'), ARGV[1], 1)
