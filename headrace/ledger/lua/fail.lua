accept({ 'owner', NAME, 'id', SAMPLE, 'attempt', COUNT, 'reason', NAME, 'detail', TEXT })
local owner, id, attempt = ARGV[1], ARGV[2], tonumber(ARGV[3])
local s = load(id)
if not s then return fenced('fail') end
local before = outcome_before(s, owner, attempt)
if before then return { before } end
if not holds(s, owner, attempt) then return fenced('fail') end
return failed(s, owner, attempt, 'failed', ARGV[4], ARGV[5])
