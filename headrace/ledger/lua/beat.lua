accept({ 'owner', NAME, 'count', COUNT })
-- The owner counts, so no count comes twice in its life. Beside it stands the count with which the entry
-- began: another one than before tells the owner that it was expired in between.
local owner, count = ARGV[1], ARGV[2]
local since = string.match(call('HGET', key('beats'), owner) or '', '/(%d+)$') or count
call('HSET', key('beats'), owner, count .. '/' .. since)
return since
