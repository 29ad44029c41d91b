-- What only grows in a ledger (`headrace/ledger/marks.py`): a caller says what it has seen, and is told what there is.
-- KEYS[2], where there is one, is PREFIX, 'seen:' and the marks, with '/' between them: arguments are the operation's.
local function marks()
  local values = redis.call('HMGET', META, 'ledger', 'version', 'lineage', 'cursor', 'term', 'writes')
  for i = 1, #values do values[i] = values[i] or '' end
  return values
end

local SEEN
if KEYS[2] then
  SEEN = {}
  for mark in string.gmatch(string.sub(KEYS[2], #PREFIX + 6) .. '/', '([^/]*)/') do SEEN[#SEEN + 1] = mark end
end

-- Whether the caller has seen more than a ledger that was just made.
local function saw_it_begin()
  return SEEN and (tonumber(SEEN[2]) > -1 or tonumber(SEEN[3]) > 0 or tonumber(SEEN[4]) > 0
    or tonumber(SEEN[5]) > 0 or tonumber(SEEN[6]) > 0)
end

local function went_back()
  return redis.error_reply('HEADRACE the ledger went back: ' .. table.concat(marks(), '/'))
end

-- Whether this is not the ledger that the caller has seen, or an older state of it.
local function is_behind()
  if not SEEN then return false end
  local there = marks()
  if SEEN[1] ~= '' and SEEN[1] ~= there[1] then return true end
  for i = 2, #there do
    if (tonumber(there[i]) or 0) < tonumber(SEEN[i]) then return true end
  end
  return false
end
