accept({ 'floor_step', VERSION })
-- No retained checkpoint is older than `floor_step`, so nothing trained up to it can be rolled back.
local floor, count = tonumber(ARGV[1]), 0
local from = num('trimmed')
if floor <= from then return 0 end
for _, id in ipairs(call('ZRANGEBYSCORE', key('trained'), '(' .. from, floor)) do
  count = count + call('HDEL', skey(id), 'prompt')
end
call('HSET', META, 'trimmed', floor)
return count
