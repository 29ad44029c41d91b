accept({ 'lineage', COUNT, 'id', SAMPLE, 'attempt', COUNT, 'reason', NAME, 'detail', TEXT, 'replaced', FLAG })
-- replaced: the window claims another sample in its place
local lineage, id, attempt = ARGV[1], ARGV[2], tonumber(ARGV[3])
if lineage ~= text('lineage') then return fenced('reject') end
local s = load(id)
if not s then return fenced('reject') end
local by = 'trainer:' .. lineage
local before = outcome_before(s, by, attempt)
if before then return { before } end
if s.state ~= 'training' or s.lineage ~= lineage or s.attempt ~= attempt then return fenced('reject') end
-- Its place in the window is used up unless another sample takes it. Otherwise the window would admit more than it
-- trains, and its commit would leave more behind than the bound on the version gap allows.
if ARGV[6] ~= '1' then bump('tw:' .. s.window) end
return failed(s, by, attempt, 'rejected', ARGV[4], ARGV[5])
