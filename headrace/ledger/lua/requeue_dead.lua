accept({ 'id', TEXT, 'request', NAME, 'ended', FLAG })
-- Into `ready`: it holds no credit until it is taken. Refused once the trainer was told that no more
-- samples come: it would never claim this one. `ended`: the run is over, and the next trainer will claim it.
local reply, err = stored('requeue_dead', ARGV[1], ARGV[2])
if err then return err end
if reply then return { 'ok' } end
local s = load(ARGV[1])
if not s or s.state ~= 'dead' then return { 'unknown' } end
if text('ending') == '1' and ARGV[3] ~= '1' then return { 'refused' } end
to_ready(s, 'operator')
call('HSET', skey(s.id), 'failures', 0, 'crashes', 0)
store('requeue_dead', ARGV[1], ARGV[2], {})
return { 'ok' }
