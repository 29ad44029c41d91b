-- Marks only grow in a ledger (`headrace/ledger/marks.py`). A caller sends those it has seen and gets the current ones.
-- KEYS[2], if present, is PREFIX, 'seen:' and the marks joined by '/'. It is a key because ARGV is the operation's.
local KNOWN = KEYS[2] and string.sub(KEYS[2], #PREFIX + 6)

local function marks()
  local values = redis.call('HMGET', META, 'ledger', 'version', 'lineage', 'cursor', 'term', 'writes')
  for i = 1, 6 do values[i] = values[i] or '' end
  return table.concat(values, '/')
end

-- The ledger's id, and the numbers as a list.
local function split(text)
  local id, numbers = string.match(text, '^[^/]*'), {}
  for number in string.gmatch(text, '/([^/]*)') do numbers[#numbers + 1] = tonumber(number) or 0 end
  return id, numbers
end

-- Whether the caller has seen more than a newly created ledger has.
local function saw_it_begin()
  if not KNOWN then return false end
  local _, seen = split(KNOWN)
  return seen[1] > -1 or seen[2] > 0 or seen[3] > 0 or seen[4] > 0 or seen[5] > 0
end

local function went_back() return redis.error_reply('HEADRACE the ledger went back: ' .. marks()) end

-- Whether this is another ledger than the caller has seen, or an older state of it.
local function is_behind()
  if not KNOWN then return false end
  local now = marks()
  if KNOWN == now then return false end
  local seen_id, seen = split(KNOWN)
  local id, there = split(now)
  if seen_id ~= '' and seen_id ~= id then return true end
  for i = 1, 5 do
    if there[i] < seen[i] then return true end
  end
  return false
end
