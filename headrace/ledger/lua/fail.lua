-- owner, id, attempt, reason, detail
local owner, id, attempt = ARGV[1], ARGV[2], tonumber(ARGV[3])
local s = load(id)
if not s then return fenced('fail') end
for _, outcome in ipairs({ 'retried', 'dead' }) do
  if s.last == ending(outcome, owner, attempt) then return { outcome } end
end
if not holds(s, owner, attempt) then return fenced('fail') end
local failures = s.failures + 1
call('HSET', skey(id), 'failures', failures)
if failures > num('max_retries') then
  to_end(s, 'dead', ARGV[4], ARGV[5], ending('dead', owner, attempt))
  return { 'dead' }
end
to_ready(s, 'failed', ending('retried', owner, attempt))
return { 'retried' }
