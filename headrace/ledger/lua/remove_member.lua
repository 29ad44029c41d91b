accept({ 'term', COUNT, 'incarnation', NAME })
-- What it holds stays its own until it parks, hands back or expires.
if ARGV[1] ~= text('term') then return fenced('remove_member') end
call('HDEL', key('members'), ARGV[2])
return { 'ok' }
