accept({ 'term', COUNT, 'incarnation', NAME, 'version', VERSION })
if ARGV[1] ~= text('term') or text('phase') ~= 'idle' or text('held') == '1' or ARGV[3] ~= text('version') then
  return { 'refused' }
end
call('HSET', key('members'), ARGV[2], ARGV[3])
return { 'ok' }
