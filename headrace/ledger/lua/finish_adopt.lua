-- lineage. Takes stay held until the lineage's first commit.
if ARGV[1] ~= text('lineage') then return fenced('adopt') end
if text('phase') ~= 'adopting' then return { 'ok', '' } end
if outstanding() > 0 then return { 'incomplete', '' } end
call('HSET', META, 'phase', 'idle')
return { 'ok', '' }
