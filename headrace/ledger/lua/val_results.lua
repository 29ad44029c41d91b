accept({ 'version', VERSION })
-- Results in order of row.
local rows, out = call('HKEYS', key('val:results:' .. ARGV[1])), {}
table.sort(rows, function(a, b) return tonumber(a) < tonumber(b) end)
for i, row in ipairs(rows) do out[i] = call('HGET', key('val:results:' .. ARGV[1]), row) end
return out
