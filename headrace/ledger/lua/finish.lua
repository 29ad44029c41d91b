accept({ 'owner', NAME, 'id', SAMPLE, 'attempt', COUNT, 'payload', BYTES, 'min_version', COUNT,
  'max_version', COUNT, 'tokens', COUNT })
if tonumber(ARGV[5]) > tonumber(ARGV[6]) then
  refuse('min_version ' .. ARGV[5] .. ' is above max_version ' .. ARGV[6])
end
local owner, id, attempt = ARGV[1], ARGV[2], tonumber(ARGV[3])
local s = load(id)
if not s then return fenced('finish') end
local last = ending('finish', owner, attempt)
if s.last == last then return { 'duplicate' } end
if not holds(s, owner, attempt) or call('HEXISTS', key('members'), owner) == 0
  or tonumber(ARGV[6]) > num('version') then
  return fenced('finish')
end
leave(s)
local eid = call('XADD', key('samples'), '*', 'id', id, 'attempt', attempt, 'min_version', ARGV[5],
  'max_version', ARGV[6], 'tokens', ARGV[7], 'payload', ARGV[4])
local seq = call('HINCRBY', META, 'seq', 1)
call('ZADD', key('queued'), seq, id)
call('HDEL', skey(id), 'work')
call('HSET', skey(id), 'state', 'queued', 'eid', eid, 'seq', seq, 'min_version', ARGV[5],
  'max_version', ARGV[6], 'tokens', ARGV[7], 'last', last, 't_finished', now())
return { 'ok' }
