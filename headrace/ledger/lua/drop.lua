accept({ 'lineage', COUNT, 'reason', NAME }, { 'id', SAMPLE })
local lineage, reason = ARGV[1], ARGV[2]
if lineage ~= text('lineage') then return fenced('drop') end
local last = 'drop:' .. lineage .. ':' .. reason
local todo, seen = {}, {}
for i = 3, #ARGV do
  local s = load(ARGV[i])
  if not s then return { 'unknown' } end
  if not (s.state == 'dropped' and s.last == last) then
    if s.state ~= 'queued' and (s.state ~= 'training' or s.lineage ~= lineage) then return { 'unknown' } end
    if not seen[s.id] then todo[#todo + 1] = s end
    seen[s.id] = true
  end
end
for _, s in ipairs(todo) do to_end(s, 'dropped', reason, '', last) end
return { 'ok' }
