accept({ 'owner', NAME, 'id', SAMPLE, 'attempt', COUNT })
local owner, id, attempt = ARGV[1], ARGV[2], tonumber(ARGV[3])
local s = load(id)
if not s then return fenced('hand_back') end
local last = ending('hand_back', owner, attempt)
if s.last == last then return { 'duplicate' } end
if not holds(s, owner, attempt) then return fenced('hand_back') end
to_ready(s, 'handback', last)
return { 'ok' }
