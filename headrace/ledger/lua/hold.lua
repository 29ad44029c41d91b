accept({ 'term', COUNT, 'round', COUNT, 'lineage', COUNT })
local round, current, phase = tonumber(ARGV[2]), num('round'), text('phase')
if ARGV[1] ~= text('term') or ARGV[3] ~= text('lineage') or phase == 'adopting' or round < current
  or (round == current and phase ~= 'syncing') then
  return fenced('hold')
end
call('HSET', META, 'phase', 'syncing', 'round', round, 'held', 1)
return { 'ok' }
