-- offset, count: dead samples in order of issue, as id, reason, detail
local ids, out = call('HKEYS', key('dead')), {}
table.sort(ids)
local first = tonumber(ARGV[1]) + 1
for i = first, math.min(#ids, first + tonumber(ARGV[2]) - 1) do
  local v = call('HMGET', skey(ids[i]), 'reason', 'detail')
  out[#out + 1], out[#out + 2], out[#out + 3] = ids[i], v[1] or '', v[2] or ''
end
return out
