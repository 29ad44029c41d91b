accept({ 'offset', COUNT, 'count', COUNT })
-- Dead samples in order of issue, as id, reason, detail, attempts, failures, crashes, prompt
local ids, out = call('HKEYS', key('dead')), {}
table.sort(ids)
local first = tonumber(ARGV[1]) + 1
for i = first, math.min(#ids, first + tonumber(ARGV[2]) - 1) do
  out[#out + 1] = ids[i]
  local names = { 'reason', 'detail', 'attempt', 'failures', 'crashes', 'prompt' }
  for _, value in ipairs(call('HMGET', skey(ids[i]), unpack(names))) do out[#out + 1] = value or '' end
end
return out
