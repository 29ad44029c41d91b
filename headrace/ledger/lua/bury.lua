accept({ 'lineage', COUNT, 'id', SAMPLE, 'reason', NAME, 'detail', TEXT })
local lineage, reason = ARGV[1], ARGV[3]
if lineage ~= text('lineage') then return fenced('bury') end
local s = load(ARGV[2])
if not s then return { 'unknown' } end
local last = 'bury:' .. lineage .. ':' .. reason
if s.state == 'dead' and s.last == last then return { 'ok' } end
if s.state ~= 'queued' and (s.state ~= 'training' or s.lineage ~= lineage) then return { 'unknown' } end
to_end(s, 'dead', reason, ARGV[4], last)
return { 'ok' }
