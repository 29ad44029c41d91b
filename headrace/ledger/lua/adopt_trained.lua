accept({ 'lineage', COUNT }, { 'id', SAMPLE, 'step', COUNT })
-- The checkpoint has trained these samples, whatever the ledger says.
if ARGV[1] ~= text('lineage') or text('phase') ~= 'adopting' then return fenced('adopt') end
local todo = {}
for i = 2, #ARGV, 2 do
  local s = load(ARGV[i])
  if not s then return { 'unknown', ARGV[i] } end
  todo[#todo + 1] = { s, ARGV[i + 1] }
end
for _, pair in ipairs(todo) do
  local s, step = pair[1], pair[2]
  if s.state ~= 'trained' then
    leave(s)
    call('HDEL', skey(s.id), 'work', 'eid', 'window')
    call('HSET', skey(s.id), 'owner', '', 'last', '')
  end
  call('ZADD', key('trained'), step, s.id)
  call('HSET', skey(s.id), 'state', 'trained', 'step', step)
end
return { 'ok', '' }
