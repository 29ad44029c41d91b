-- Shared by every script: keys, reading, and the moves between places.
-- KEYS[1] is headrace:{run}:meta; every other key has the same prefix and so the same hash tag.
-- Rule for all scripts: read and validate everything first, then write. A Lua error does not roll back
-- earlier writes, so nothing after the first write may fail.
local META = KEYS[1]
local PREFIX = string.sub(META, 1, -5)
local READS = { GET = 1, HEXISTS = 1, HGET = 1, HGETALL = 1, HKEYS = 1, HLEN = 1, HMGET = 1, HVALS = 1,
  SCAN = 1, SISMEMBER = 1, SMEMBERS = 1, TIME = 1, TYPE = 1, XLEN = 1, XRANGE = 1, ZCARD = 1, ZRANGE = 1, ZRANGEBYSCORE = 1 }
local wrote = false -- whether this call has changed anything

local function call(name, ...)
  if not READS[name] then wrote = true end
  return redis.call(name, ...)
end

local function key(name) return PREFIX .. name end
local function skey(id) return PREFIX .. 's:' .. id end
local function num(field) return tonumber(call('HGET', META, field) or '0') end
local function text(field) return call('HGET', META, field) or '' end
local function bump(field, by) call('HINCRBY', META, field, by or 1) end

local function now()
  local t = call('TIME')
  return string.format('%d.%06d', tonumber(t[1]), tonumber(t[2]))
end

-- Answer `fenced` to a late or outdated request and count it, in total and by operation.
local function fenced(op)
  bump('fenced')
  bump('fenced:' .. op)
  return { 'fenced' }
end

local FIELDS = { 'state', 'owner', 'attempt', 'issue', 'eid', 'failures', 'crashes', 'window', 'lineage',
  'reason', 'last', 'min_version', 'max_version', 'tokens', 't_finished', 'step', 'seq', 'survived' }
local NUMBERS = { attempt = true, issue = true, failures = true, crashes = true }

-- The sample's record without its blobs, or nil for an unknown id.
local function load(id)
  local values = call('HMGET', skey(id), unpack(FIELDS))
  if not values[1] then return nil end
  local s = { id = id }
  for i, name in ipairs(FIELDS) do
    s[name] = values[i] or ''
    if NUMBERS[name] then s[name] = tonumber(values[i] or '0') end
  end
  return s
end

-- Whether this (owner, attempt) holds the sample now.
local function holds(s, owner, attempt)
  return s.state == 'in_flight' and s.owner == owner and s.attempt == attempt
end

-- How an ownership ended. Distinguishes a repeat of the request that ended it from a late one.
local function ending(event, owner, attempt) return event .. ':' .. attempt .. ':' .. owner end

local function ready_count() return call('XLEN', key('prompts')) + call('ZCARD', key('retries')) end

local function outstanding()
  return call('HLEN', key('inflight')) + call('ZCARD', key('parked'))
    + call('ZCARD', key('queued')) + call('HLEN', key('training'))
end

-- Trained in the windows that no commit has closed: the committed version's and, once the trainer has
-- written the next snapshot, the following one. claim refuses any other window.
local function trained_since_sync()
  local v = num('version')
  return num('tw:' .. v) + num('tw:' .. (v + 1))
end

-- Whether no more samples can be finished beyond those already queued.
local function source_dry()
  return text('end_of_data') == '1' and ready_count() == 0
    and call('HLEN', key('inflight')) == 0 and call('ZCARD', key('parked')) == 0
end

-- Remove the sample from the place of its state. The caller writes the new state.
local function leave(s)
  local id, state = s.id, s.state
  if state == 'ready' then
    local eid = s.issue .. '-1'
    local entry = call('XRANGE', key('prompts'), eid, eid)[1]
    if entry then -- until the first take only the stream holds the prompt's bytes
      call('HSET', skey(id), 'prompt', entry[2][4])
      call('XDEL', key('prompts'), eid)
    end
    call('ZREM', key('retries'), id)
  elseif state == 'in_flight' then
    call('HDEL', key('inflight'), id)
    call('SREM', key('owned:' .. s.owner), id)
  elseif state == 'parked' then call('ZREM', key('parked'), id)
  elseif state == 'queued' then
    call('ZREM', key('queued'), id)
    call('XDEL', key('samples'), s.eid)
  elseif state == 'training' then
    call('HDEL', key('training'), id)
    call('XDEL', key('samples'), s.eid)
  elseif state == 'trained' then call('ZREM', key('trained'), id)
  else call('HDEL', key(state), id) -- dead, dropped
  end
end

-- Back into `ready`, to restart from the prompt. `attempt` is kept: it only grows.
local function to_ready(s, reason, last)
  leave(s)
  call('HDEL', skey(s.id), 'work', 'min_version', 'max_version', 'tokens', 'eid', 'seq', 'window', 'step',
    'lineage', 'detail', 't_finished', 't_claimed', 'survived')
  call('HSET', skey(s.id), 'state', 'ready', 'owner', '', 'reason', reason, 'last', last or '')
  call('ZADD', key('retries'), s.issue, s.id)
  bump('requeued:' .. reason)
end

-- Out of the run for `reason`; state is dead or dropped. Its tokens and versions stay readable.
local function to_end(s, state, reason, detail, last)
  leave(s)
  call('HDEL', skey(s.id), 'work', 'eid', 'window')
  call('HSET', skey(s.id), 'state', state, 'reason', reason, 'detail', detail, 'last', last or '')
  call('HSET', key(state), s.id, reason)
  bump(state .. ':' .. reason)
end

-- The earlier outcome of an attempt that `by` reports as failed; nil if there is none.
local function outcome_before(s, by, attempt)
  for _, outcome in ipairs({ 'retried', 'dead' }) do
    if s.last == ending(outcome, by, attempt) then return outcome end
  end
end

-- Count a failure of the sample: it is requeued as `requeued`, or dies of `reason`.
local function failed(s, by, attempt, requeued, reason, detail)
  local failures = s.failures + 1
  call('HSET', skey(s.id), 'failures', failures)
  if failures > num('max_retries') then
    to_end(s, 'dead', reason, detail, ending('dead', by, attempt))
    return { 'dead' }
  end
  to_ready(s, requeued, ending('retried', by, attempt))
  return { 'retried' }
end

-- The stored reply to a repeated request, or nil. Stored replies hold ids only; a replay reads payloads again.
local function stored(op, by, request)
  local raw = call('GET', key('reply:' .. request))
  if not raw then return nil end
  local reply = cjson.decode(raw)
  if reply.op ~= op or reply.by ~= by then
    return nil, redis.error_reply('HEADRACE request id ' .. request .. ' was used by ' .. reply.op)
  end
  return reply
end

local function store(op, by, request, reply)
  reply.op, reply.by = op, by
  call('SET', key('reply:' .. request), cjson.encode(reply), 'EX', 900)
end
