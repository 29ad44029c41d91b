accept({ 'owner', NAME, 'count', COUNT })
-- The owner counts its beats, so no count repeats in its lifetime. The entry also stores the count with
-- which it began: if that changes, the owner knows that it was expired in between.
local owner, count = ARGV[1], ARGV[2]
local since = string.match(call('HGET', key('beats'), owner) or '', '/(%d+)$') or count
call('HSET', key('beats'), owner, count .. '/' .. since)
return since
