accept({ 'owner', NAME, 'version', VERSION, 'count', COUNT, 'request', NAME, 'oldest_version', WHOLE })
local owner, version, count, request, oldest =
  ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])

local function answer(status, pairs_)
  local out = { status }
  for _, pair in ipairs(pairs_) do
    local id, attempt = pair[1], pair[2]
    local s = load(id)
    if s and holds(s, owner, attempt) then -- a replay omits samples lost since
      local blobs = call('HMGET', skey(id), 'prompt', 'work')
      for _, value in ipairs({ id, attempt, blobs[1] or '', blobs[2] and 1 or 0, blobs[2] or '', s.failures }) do
        out[#out + 1] = value
      end
    end
  end
  return out
end

-- A sample over which this many owners have died may be what kills them. An owner gets only one such sample at a
-- time, so that a poison prompt does not charge crashes to other suspects.
local SUSPECT = 2

local function owns_suspect()
  for _, id in ipairs(call('SMEMBERS', key('owned:' .. owner))) do
    if tonumber(call('HGET', skey(id), 'crashes')) >= SUSPECT then return true end
  end
  return false
end

-- At most `limit` retries in order of issue, including one suspect if the owner has none.
local function next_retries(limit)
  local found, at, has_suspect = {}, 0, nil
  while #found < limit do
    local ids = call('ZRANGE', key('retries'), at, at + limit - 1)
    if #ids == 0 then break end
    at = at + #ids
    for _, id in ipairs(ids) do
      local is_suspect = tonumber(call('HGET', skey(id), 'crashes')) >= SUSPECT
      if is_suspect and has_suspect == nil then has_suspect = owns_suspect() end
      if #found < limit and not (is_suspect and has_suspect) then
        found[#found + 1] = id
        if is_suspect then has_suspect = true end
      end
    end
  end
  return found
end

local reply, err = stored('take', owner, request)
if err then return err end
if reply then return answer('ok', reply.items) end
if text('held') == '1' then return { 'held' } end
if version ~= num('version') then return { 'stale_version' } end
if call('HEXISTS', key('members'), owner) == 0 then return { 'not_member' } end

-- Parked work first: it still holds its credit, so the gate does not apply.
local chosen = {}
if count > 0 then chosen = call('ZRANGE', key('parked'), 0, count - 1) end
local room = num('max_required') - outstanding() - trained_since_sync()
local starts = math.max(0, math.min(count - #chosen, room))
local fresh = {}
if starts > 0 then
  local retries = next_retries(starts)
  for _, id in ipairs(retries) do chosen[#chosen + 1] = id end
  if starts > #retries then
    for _, entry in ipairs(call('XRANGE', key('prompts'), '-', '+', 'COUNT', starts - #retries)) do
      chosen[#chosen + 1] = entry[2][2]
    end
  end
end
if #chosen == 0 then
  if source_dry() then return { 'done' } end
  if count > 0 and ready_count() > 0 then return { 'gate_closed' } end
  return { 'empty' }
end

local t, items = now(), {}
for i, id in ipairs(chosen) do
  local s = load(id)
  leave(s)
  if s.state == 'parked' and tonumber(s.min_version) < oldest then
    -- Too old to continue: restart from the prompt, with the same credit.
    call('HDEL', skey(id), 'work', 'min_version', 'max_version')
    bump('restarted')
  end
  call('HSET', skey(id), 'state', 'in_flight', 'owner', owner, 'attempt', s.attempt + 1, 't_taken', t)
  call('HSET', key('inflight'), id, owner)
  call('SADD', key('owned:' .. owner), id)
  items[i] = { id, s.attempt + 1 }
end
store('take', owner, request, { items = items })
return answer('ok', items)
