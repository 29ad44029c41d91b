accept({ 'owner', NAME, 'detail', TEXT, 'seen', SEEN, 'left', FLAG })
-- `seen` is the observed count of its beat ('': any; -1: no beat): an owner that has beaten since is alive. `left`: it
-- shut down cleanly. Everything it owned is taken from it, so a repeat finds nothing to do.
local owner, detail, seen, left = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
if seen ~= '' and seen ~= (string.match(call('HGET', key('beats'), owner) or '', '^%d+') or '-1') then
  return { {}, {}, 0 }
end
local ids = call('SMEMBERS', key('owned:' .. owner))
table.sort(ids)
local limit = num('max_crashes')
call('HDEL', key('members'), owner)
call('HDEL', key('beats'), owner)
local requeued, dead = {}, {}
for _, id in ipairs(ids) do
  local s = load(id)
  if not left then call('HSET', skey(id), 'crashes', s.crashes + 1) end
  if left then
    to_ready(s, 'handback')
    requeued[#requeued + 1] = id
  elseif s.crashes + 1 > limit then
    to_end(s, 'dead', 'poison', detail)
    dead[#dead + 1] = id
  else
    to_ready(s, 'expired')
    call('HSET', skey(id), 'detail', detail)
    requeued[#requeued + 1] = id
  end
end
local taken = call('HGETALL', key('val:taken'))
for i = 1, #taken, 2 do
  if taken[i + 1] == owner then
    call('HDEL', key('val:taken'), taken[i])
    call('ZADD', key('val:todo'), taken[i], taken[i])
  end
end
return { requeued, dead, 1 }
