accept({ 'version', VERSION })
if ARGV[1] == text('val:version') then return { 'refused' } end
call('UNLINK', key('val:results:' .. ARGV[1]))
return { 'ok' }
