accept({ 'lineage', COUNT, 'window', VERSION, 'count', POSITIVE, 'request', NAME })
-- `count` at once or none; fewer only if they are the run's last.
local lineage, window, count, request = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local version = num('version')

local function answer(status, pairs_)
  local out = { status }
  for _, pair in ipairs(pairs_) do
    local id, attempt = pair[1], pair[2]
    local s = load(id)
    if s and s.state == 'training' and s.attempt == attempt then -- a replay returns only what is still claimed
      for _, value in ipairs({ id, s.eid, attempt, s.min_version, s.max_version, s.tokens, s.t_finished }) do
        out[#out + 1] = value
      end
    end
  end
  return out
end

if lineage ~= text('lineage') then return fenced('claim') end
local reply, err = stored('claim', lineage, request)
if err then return err end
if reply then return answer(reply.status, reply.items) end
-- The window is the committed version's, or the next one's once its snapshot is written. It never goes back.
if window < num('window') or (window ~= version and window ~= version + 1) then return fenced('claim') end
if text('phase') == 'adopting' then return { 'wait' } end

local status, queued = 'batch', call('ZCARD', key('queued'))
if queued < count then
  if not source_dry() then return { 'wait' } end
  call('HSET', META, 'ending', 1) -- the trainer may stop after this answer: see requeue_dead
  if queued == 0 then return { 'done' } end
  status = 'final_short'
end
local ids = call('ZRANGE', key('queued'), 0, count - 1)
local t, items = now(), {}
for i, id in ipairs(ids) do
  items[i] = { id, load(id).attempt }
  call('ZREM', key('queued'), id)
  call('HSET', key('training'), id, window)
  call('HSET', skey(id), 'state', 'training', 'window', window, 'lineage', lineage, 't_claimed', t)
end
call('HSET', META, 'window', window)
store('claim', lineage, request, { status = status, items = items })
return answer(status, items)
