-- id. Into `ready`: it holds no credit until it is taken.
local s = load(ARGV[1])
if not s or s.state ~= 'dead' then return { 'unknown' } end
to_ready(s, 'operator')
call('HSET', skey(s.id), 'failures', 0, 'crashes', 0)
return { 'ok' }
