-- ids: payload of each queued or training sample, empty for any other
local out = {}
for i, id in ipairs(ARGV) do
  local s, entry = load(id), nil
  if s and s.eid ~= '' then entry = call('XRANGE', key('samples'), s.eid, s.eid)[1] end
  out[i] = entry and entry[2][12] or ''
end
return out
