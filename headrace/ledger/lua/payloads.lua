accept({}, { 'id', TEXT })
-- For each queued or training sample: its payload, its prompt as issued, and the owner that finished it. Three empty
-- texts for any other.
local out = {}
for _, id in ipairs(ARGV) do
  local s, entry = load(id), nil
  if s and s.eid ~= '' then entry = call('XRANGE', key('samples'), s.eid, s.eid)[1] end
  local found = { '', '', '' }
  if entry then found = { entry[2][12], call('HGET', skey(id), 'prompt') or '', s.owner } end
  for _, value in ipairs(found) do out[#out + 1] = value end
end
return out
