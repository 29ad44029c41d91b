-- Argument checks. Every script begins with accept(...); scripts.py refuses to assemble one that does not. A refusal is
-- an error that names the argument, and nothing was written. This runs at every call, so it creates no closure or table
-- that only a refusal needs.

-- Forms. A number as a form means a whole number not below it. Version -1 is the one before the first commit.
local COUNT, POSITIVE, VERSION, WHOLE = 0, 1, -1, -99999999999999
local FLAG, SEEN, SAMPLE, NAME, TEXT, JSON = 'flag', 'seen', 'sample', 'name', 'text', 'json'
local BYTES, ANY = 'bytes', 'any'

local find = string.find

local function refuse(what) error(redis.error_reply('HEADRACE refused: ' .. what)) end

-- Replaces each well-formed UTF-8 character with a dot. Text is valid if no byte above ASCII remains.
local function is_utf8(value)
  for _, form in ipairs({ '[\194-\223][\128-\191]', '\224[\160-\191][\128-\191]',
    '[\225-\236\238\239][\128-\191][\128-\191]', '\237[\128-\159][\128-\191]',
    '\240[\144-\191][\128-\191][\128-\191]', '[\241-\243][\128-\191][\128-\191][\128-\191]',
    '\244[\128-\143][\128-\191][\128-\191]' }) do
    value = string.gsub(value, form, '.')
  end
  return not find(value, '[\128-\255]')
end

-- What `value` must be; nil if it is valid.
local wanted
function wanted(form, value)
  if type(form) == 'number' then
    -- The canonical form, because the ledger compares numbers as text. Lua prints 14 digits: up to there Lua, JSON and
    -- Redis write numbers alike.
    local n = (value == '0' or find(value, '^%-?[1-9]%d*$')) and #value <= 15 and tonumber(value)
    if n and n >= form and n <= 99999999999999 then return nil end
    return 'a whole number from ' .. string.format('%.0f', form) .. ' to 99999999999999'
  elseif form == NAME then -- owners, requests, reasons: parts of keys, fields and JSON
    if #value <= 256 and find(value, '^[!-~]+$') then return nil end
    return '1 to 256 printable ASCII characters without spaces'
  elseif form == SAMPLE then
    if #value == 10 and find(value, '^%d+$') then return nil end
    return 'the id of a sample: ten digits'
  elseif form == BYTES then
    return #value == 0 and 'at least one byte' or nil
  elseif form == ANY then -- a message with default values only is empty
    return nil
  elseif form == FLAG then
    return value ~= '0' and value ~= '1' and '0 or 1' or nil
  elseif form == SEEN then -- the count of a beat as an observer saw it, or nothing
    return value ~= '' and wanted(VERSION, value) or nil
  elseif form == JSON then -- from a configuration, with its tool schemas and prompts
    if #value <= 1048576 and not find(value, '[\128-\255]') then return nil end
    return 'at most 1048576 bytes of JSON in ASCII'
  elseif form == TEXT then -- for people to read; returned as JSON
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

-- accept({ name, form, ... }): exactly these arguments. With `group`, of the same shape, `least` (default 0) to `most`
-- whole groups follow them.
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

-- A foreign value under one of the ledger's keys would make a script fail between two writes. Checked when a service
-- opens the ledger, not at every call.
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
