accept({}, { 'row', COUNT, 'bytes', BYTES })
for i = 1, #ARGV, 2 do call('HSET', key('val:rows'), ARGV[i], ARGV[i + 1]) end
return call('HLEN', key('val:rows'))
