accept({ 'term', COUNT, 'round', COUNT })
-- Give up a round. A lineage without a commit stays held.
if ARGV[1] ~= text('term') or tonumber(ARGV[2]) ~= num('round') or text('phase') == 'adopting' then
  return fenced('release')
end
call('HSET', META, 'phase', 'idle', 'held', text('fresh'))
return { 'ok' }
