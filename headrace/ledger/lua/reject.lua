-- lineage, id, attempt, reason, detail
local lineage, id, attempt = ARGV[1], ARGV[2], tonumber(ARGV[3])
if lineage ~= text('lineage') then return fenced('reject') end
local s = load(id)
if not s then return fenced('reject') end
local by = 'trainer:' .. lineage
for _, outcome in ipairs({ 'retried', 'dead' }) do
  if s.last == ending(outcome, by, attempt) then return { outcome } end
end
if s.state ~= 'training' or s.lineage ~= lineage or s.attempt ~= attempt then return fenced('reject') end
local failures = s.failures + 1
-- Its place in the window is used up all the same: a window that lets in more than it trains would leave
-- more behind at its commit than the bound on the version gap allows for.
bump('tw:' .. s.window)
call('HSET', skey(id), 'failures', failures)
if failures > num('max_retries') then
  to_end(s, 'dead', ARGV[4], ARGV[5], ending('dead', by, attempt))
  return { 'dead' }
end
to_ready(s, 'rejected', ending('retried', by, attempt))
return { 'retried' }
