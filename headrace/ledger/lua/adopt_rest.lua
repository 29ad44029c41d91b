accept({ 'lineage', COUNT }, { 'id', SAMPLE })
-- Ids that the checkpoint has not trained. finish_adopt decides on finished and parked ones.
if ARGV[1] ~= text('lineage') or text('phase') ~= 'adopting' then return fenced('adopt') end
local REASON = { trained = 'rollback', in_flight = 'lineage' }
local todo, seen = {}, {}
for i = 2, #ARGV do
  local s = load(ARGV[i])
  if not s then return { 'unknown', ARGV[i] } end
  if REASON[s.state] and call('HEXISTS', skey(s.id), 'prompt') == 0 then return { 'trimmed', ARGV[i] } end
  if REASON[s.state] and not seen[s.id] then todo[#todo + 1] = s end
  seen[s.id] = true
end
for _, s in ipairs(todo) do to_ready(s, REASON[s.state]) end
return { 'ok', '' }
