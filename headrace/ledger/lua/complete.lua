accept({ 'lineage', COUNT })
-- The lineage's trainer has saved and exported everything. A later lineage reopens the run.
if ARGV[1] ~= text('lineage') then return fenced('complete') end
call('HSET', META, 'completed', 1)
return { 'ok' }
