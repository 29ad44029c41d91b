accept({ 'lineage', COUNT }, { 'parent', VERSION, 'windows', COUNT, 'gap', VERSION, 'crosses', VERSION,
  'window', POSITIVE, 'limit', COUNT, 'scoring', TEXT, 'snapshot', VERSION }, 0, 1)
-- With a Keep, work finished or parked under an abandoned lineage is kept if it will be trained within the gap. The gap
-- is measured both in versions and in windows of training between the policies that sampled the work and the resumed
-- one. Work is judged in order of finish: the number of samples before it decides which window trains it. Takes stay
-- held until the first commit.
if ARGV[1] ~= text('lineage') then return fenced('adopt') end
if text('phase') ~= 'adopting' then return { 'ok', '' } end
if call('HLEN', key('inflight')) > 0 then return { 'incomplete', '' } end

local parent, windows, gap = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]) -- gap -1: unbounded
local crosses, window, limit, scoring = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8]
if not scoring or scoring ~= text('scoring') then limit = 0 end
local first = num('version') + 1 -- this lineage's first commit; it trains nothing before it
if parent and parent >= first then
  return redis.error_reply('HEADRACE version ' .. parent .. ' of the checkpoint is not committed')
end

-- The checkpoint's weights were about to become version `snapshot`. They are that version unless it was never committed
-- or is another lineage's first.
local snapshot = tonumber(ARGV[9] or '-1')
if parent and snapshot > parent and snapshot < first and call('HEXISTS', META, 'fork:' .. snapshot) == 0 then
  parent, windows = snapshot, 0
end

-- The version that `version` comes from, and the windows of training between the two.
local function origin(version)
  if version == first then return parent, windows end
  local fork = call('HGET', META, 'fork:' .. version)
  if not fork then return version - 1, 1 end
  local from, between = string.match(fork, '^(-?%d+):(%d+)$')
  return tonumber(from), tonumber(between)
end

-- Windows of training between a policy and the resumed one. Stops counting beyond the gap.
local known = {}
local function distance(version)
  if not known[version] then
    local low, high, count = version, first, 0
    while low ~= high and count <= gap do
      if high < low then low, high = high, low end
      local from, between = origin(high)
      high, count = from, count + between
    end
    known[version] = count
  end
  return known[version]
end

-- The largest distance of any policy that may have sampled it.
local function furthest(s)
  local most = 0
  for version = tonumber(s.min_version), tonumber(s.max_version) do
    most = math.max(most, distance(version))
    if most > gap then break end
  end
  return most
end

local kept, place = { queued = {}, training = {}, parked = {} }, 0

local function fits(s)
  if place >= limit or s.min_version == '' or s.max_version == '' then return false end
  if s.state == 'training' and (s.seq == '' or s.survived ~= '') then return false end -- two trainers ended over it
  if gap < 0 then return true end
  local age = first - tonumber(s.min_version)
  if s.state == 'parked' then -- the rule bounds its wait: age and distance grow alike
    return gap > 0 and age < crosses and furthest(s) <= age
  end
  local wait = math.floor(place / window)
  return age + wait <= gap and furthest(s) + wait <= gap
end

local finished, parked, gone = {}, {}, {}
for _, id in ipairs(call('HKEYS', key('training'))) do finished[#finished + 1] = load(id) end
local queued = call('ZRANGE', key('queued'), 0, -1, 'WITHSCORES')
for i = 1, #queued, 2 do
  local s = load(queued[i])
  s.seq = queued[i + 1] -- an earlier release may have left it out of the record
  finished[#finished + 1] = s
end
table.sort(finished, function(a, b) return (tonumber(a.seq) or 0) < (tonumber(b.seq) or 0) end)
for _, id in ipairs(call('ZRANGE', key('parked'), 0, -1)) do parked[#parked + 1] = load(id) end
for _, group in ipairs({ finished, parked }) do
  for _, s in ipairs(group) do
    if fits(s) then
      kept[s.state][#kept[s.state] + 1] = s
      place = place + 1
    else
      gone[#gone + 1] = s
    end
  end
end
for _, s in ipairs(gone) do
  if call('HEXISTS', skey(s.id), 'prompt') == 0 then return { 'trimmed', s.id } end
end

for _, s in ipairs(gone) do to_ready(s, s.state == 'training' and 'rollback' or 'lineage') end
for _, s in ipairs(kept.training) do
  call('HDEL', key('training'), s.id)
  call('ZADD', key('queued'), s.seq, s.id)
  call('HSET', skey(s.id), 'state', 'queued', 'survived', 1)
  call('HDEL', skey(s.id), 'window', 'lineage', 't_claimed')
end
for state, group in pairs(kept) do
  if #group > 0 then bump('kept:' .. state, #group) end
end
if scoring then call('HSET', META, 'fork:' .. first, parent .. ':' .. windows, 'scoring', scoring) end
call('HSET', META, 'phase', 'idle')
return { 'ok', '' }
