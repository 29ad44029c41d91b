accept({ 'owner', NAME, 'version', VERSION, 'row', COUNT, 'result', ANY })
local owner, version, row = ARGV[1], ARGV[2], ARGV[3]
if version ~= text('val:version') then return { 'refused' } end
if call('HGET', key('val:done'), row) == owner then return { 'ok' } end
if text('val:open') ~= '1' or call('HGET', key('val:taken'), row) ~= owner
  or call('HEXISTS', key('members'), owner) == 0 then
  return { 'refused' }
end
local results = key('val:results:' .. version)
call('HDEL', key('val:taken'), row)
call('HSET', key('val:done'), row, owner)
call('HSET', results, row, ARGV[4])
if call('HLEN', results) == call('HLEN', key('val:rows')) then call('HSET', META, 'val:open', 0) end
return { 'ok' }
