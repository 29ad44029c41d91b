accept({ 'owner', NAME, 'id', SAMPLE, 'attempt', COUNT, 'work', BYTES, 'min_version', COUNT })
-- Membership is not required: a draining owner still holds its samples.
local owner, id, attempt = ARGV[1], ARGV[2], tonumber(ARGV[3])
local s = load(id)
if not s then return fenced('park') end
local last = ending('park', owner, attempt)
if s.last == last then return { 'duplicate' } end
if not holds(s, owner, attempt) or tonumber(ARGV[5]) > num('version') then return fenced('park') end
leave(s)
call('ZADD', key('parked'), s.issue, id)
-- No token is newer than the committed version. The newest token's exact version is unknown.
call('HSET', skey(id), 'state', 'parked', 'owner', '', 'work', ARGV[4], 'min_version', ARGV[5],
  'max_version', num('version'), 'last', last)
return { 'ok' }
