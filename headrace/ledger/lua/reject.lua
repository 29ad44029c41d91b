accept({ 'lineage', COUNT, 'id', SAMPLE, 'attempt', COUNT, 'reason', NAME, 'detail', TEXT, 'replaced', FLAG })
-- replaced: the window claims another in its place
local lineage, id, attempt = ARGV[1], ARGV[2], tonumber(ARGV[3])
if lineage ~= text('lineage') then return fenced('reject') end
local s = load(id)
if not s then return fenced('reject') end
local by = 'trainer:' .. lineage
local before = outcome_before(s, by, attempt)
if before then return { before } end
if s.state ~= 'training' or s.lineage ~= lineage or s.attempt ~= attempt then return fenced('reject') end
-- Its place in the window is used up, unless another gets it: a window that lets in more than it trains would
-- leave more behind at its commit than the bound on the version gap allows for.
if ARGV[6] ~= '1' then bump('tw:' .. s.window) end
return failed(s, by, attempt, 'rejected', ARGV[4], ARGV[5])
