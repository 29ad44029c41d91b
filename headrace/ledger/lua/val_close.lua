accept({ 'version', VERSION })
if ARGV[1] ~= text('val:version') then return { 'refused' } end
call('HSET', META, 'val:open', 0)
return { 'ok' }
