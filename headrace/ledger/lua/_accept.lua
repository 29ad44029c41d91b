-- Arguments, checked before a script does anything: each begins with accept(...), and scripts.py assembles none that
-- does not. A refusal is an error that names the argument; nothing was written. All of this is run at every call, so it
-- makes no closure or table that only a refusal needs.

-- Forms. A number is a whole number from there on; version -1 is before the first commit.
local COUNT, POSITIVE, VERSION, WHOLE = 0, 1, -1, -99999999999999
local FLAG, SEEN, SAMPLE, NAME, TEXT, JSON = 'flag', 'seen', 'sample', 'name', 'text', 'json'
local BYTES, ANY = 'bytes', 'any'

local find = string.find

local function refuse(what) error(redis.error_reply('HEADRACE refused: ' .. what)) end

-- Well-formed UTF-8 becomes dots, a whole character at a time; what is left has no byte above ASCII.
local function is_utf8(value)
  for _, form in ipairs({ '[\194-\223][\128-\191]', '\224[\160-\191][\128-\191]',
    '[\225-\236\238\239][\128-\191][\128-\191]', '\237[\128-\159][\128-\191]',
    '\240[\144-\191][\128-\191][\128-\191]', '[\241-\243][\128-\191][\128-\191][\128-\191]',
    '\244[\128-\143][\128-\191][\128-\191]' }) do
    value = string.gsub(value, form, '.')
  end
  return not find(value, '[\128-\255]')
end

-- What `value` must be; nil when it is.
local wanted
function wanted(form, value)
  if type(form) == 'number' then
    -- In the one form that the ledger compares as text. Lua prints 14 digits: so far Lua, JSON and Redis write alike.
    local n = (value == '0' or find(value, '^%-?[1-9]%d*$')) and #value <= 15 and tonumber(value)
    if n and n >= form and n <= 99999999999999 then return nil end
    return 'a whole number from ' .. string.format('%.0f', form) .. ' to 99999999999999'
  elseif form == NAME then -- owners, requests, reasons: they become parts of keys, fields and JSON
    if #value <= 256 and find(value, '^[!-~]+$') then return nil end
    return '1 to 256 printable ASCII characters without spaces'
  elseif form == SAMPLE then
    if #value == 10 and find(value, '^%d+$') then return nil end
    return 'the id of a sample: ten digits'
  elseif form == BYTES then
    return #value == 0 and 'at least one byte' or nil
  elseif form == ANY then -- a message whose fields may all have their defaults
    return nil
  elseif form == FLAG then
    return value ~= '0' and value ~= '1' and '0 or 1' or nil
  elseif form == SEEN then -- the count of a beat as an observer saw it, or nothing
    return value ~= '' and wanted(VERSION, value) or nil
  elseif form == JSON then -- what a configuration says, with the schemas of its tools and its prompts
    if #value <= 1048576 and not find(value, '[\128-\255]') then return nil end
    return 'at most 1048576 bytes of JSON in ASCII'
  elseif form == TEXT then -- what people read; it comes out again as JSON
    if #value > 16384 then return 'at most 16384 bytes of UTF-8' end
    return find(value, '[\128-\255]') and not is_utf8(value) and 'text in UTF-8' or nil
  end
  return 'declared with a form that there is'
end

local function check(declared, from)
  for i = 1, #declared, 2 do
    local value = ARGV[from + (i + 1) / 2]
    local must = wanted(declared[i + 1], value)
    if must then
      local shown = string.gsub(string.sub(value, 1, 40), '[^ -~]', '?')
      refuse("the argument " .. declared[i] .. " is '" .. shown .. "', and must be " .. must)
    end
  end
end

-- accept({ name, form, ... }): these and no others. With `group`, which has the same shape, whole groups of it follow,
-- `least` (0) to `most` of them.
local function accept(first, group, least, most)
  local given, fixed = #ARGV, #first / 2
  if group then
    local width = #group / 2
    local groups = (given - fixed) / width
    if groups < (least or 0) or groups > (most or groups) or groups % 1 ~= 0 then
      refuse(given .. ' arguments, and there must be ' .. fixed .. ' and then groups of ' .. width)
    end
    check(first, 0)
    for n = 0, groups - 1 do check(group, fixed + n * width) end
  else
    if given ~= fixed then refuse(given .. ' arguments, and there must be ' .. fixed) end
    check(first, 0)
  end
end

-- Where something else than the ledger's lies under its names a script would end between two writes. Looked at when a
-- service begins with the ledger, not at every call.
local function check_places()
  local shapes = { stream = { 'prompts', 'samples' }, zset = { 'retries', 'parked', 'queued', 'trained', 'val:todo' },
    hash = { 'inflight', 'training', 'dead', 'dropped', 'members', 'beats', 'val:taken', 'val:done', 'val:rows' } }
  for shape, names in pairs(shapes) do
    for _, name in ipairs(names) do
      local found = call('TYPE', key(name)).ok
      if found ~= shape and found ~= 'none' then
        error(redis.error_reply('HEADRACE the key ' .. key(name) .. ' holds a ' .. found .. ' and must hold a ' .. shape
          .. ': something else has written there; delete that key, or give the run another name'))
      end
    end
  end
end

if #KEYS > 2 or KEYS[2] and not find(KEYS[2], PREFIX .. 'seen:', 1, true)
  or not find(META, '^headrace:{[%w_.-]+}:meta$') then
  refuse('the one key of a script is headrace:{run}:meta; what its caller has seen may follow')
end
