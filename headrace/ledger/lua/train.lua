accept({ 'lineage', COUNT, 'step', COUNT }, { 'id', SAMPLE })
local lineage, step = ARGV[1], ARGV[2]
if lineage ~= text('lineage') then return fenced('train') end
local todo, seen = {}, {}
for i = 3, #ARGV do
  local s = load(ARGV[i])
  if not s or s.lineage ~= lineage then return { 'unknown' } end
  if s.state == 'training' then
    if not seen[s.id] then todo[#todo + 1] = s end
    seen[s.id] = true
  elseif s.state ~= 'trained' then return { 'unknown' }
  end
end
for _, s in ipairs(todo) do
  leave(s)
  call('ZADD', key('trained'), step, s.id)
  call('HSET', skey(s.id), 'state', 'trained', 'step', step)
  call('HDEL', skey(s.id), 'eid')
  bump('tw:' .. s.window)
end
return { 'ok' }
