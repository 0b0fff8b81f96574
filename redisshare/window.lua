-- The window of one name, for all who share it. One run is one decision, or one batch of corrections, on one window.
--
-- It is the rule, the log and the peaks of package quotashare (admit.go, window.go, internal/sliding), whose comments say
-- what each part is for; here they have the same names. A run reads what it needs of the hash, and writes it back in
-- one step. Instants are microseconds of this server's clock. All numbers are whole and at most 2^53, which the
-- numbers of Lua hold exactly.
--
-- KEYS  1: the window, a hash
-- ARGV  1: what to do   2: numbers: of the request in its slot; the first of the requests before it whose answers nobody
--       got, or 0; the last one that was answered, and the epoch and the count that the caller saw last, 0 if that is
--       older than a window; 1 to go on though the usage was lost; a digest of the rule; and what the operation needs
--       3: the rule   4: the slot, a field of the hash for what was last answered to it
--
-- The answer begins with one of
local DONE, LOST, OTHER_WINDOW, STALE = 0, 1, 2, 3

local OWN, BORROWED, FULL, RESERVED, CAPPED, PACED, QUEUED = 1, 2, 3, 4, 5, 6, 7 -- the values of quotashare.Reason

local MAX = 9007199254740992
local NEVER = MAX -- an instant
local floor, min, max, rep, sub = math.floor, math.min, math.max, string.rep, string.sub
local call = redis.call

-- Numbers are packed into strings of eight bytes each, in Redis and on the way. An embedded server may not have the
-- struct library.
local struct = rawget(_G, 'struct')
local pack, unpackAt = struct and struct.pack, struct and struct.unpack
if not struct then
	function pack(_, ...)
		local bytes = {}
		for _, n in ipairs({...}) do
			for i = 7, 0, -1 do bytes[#bytes + 1] = string.char(floor(n / 256 ^ i) % 256) end
		end
		return table.concat(bytes)
	end
	function unpackAt(form, s, from)
		local numbers = {}
		for k = 1, (#form - 1) / 2 do
			numbers[k] = 0
			for i = 0, 7 do numbers[k] = numbers[k] * 256 + string.byte(s, from + 8 * (k - 1) + i) end
		end
		return unpack(numbers)
	end
end
-- The forms of what is packed; written out, since to make them takes longer than to use them.
local NUMBER, CHARGE, CORRECTION = '>I8', '>I8I8', '>I8I8I8I8I8'
local ANSWER, LOG, REQUEST = '>I8I8I8I8I8I8', '>I8I8I8I8I8I8I8', '>I8I8I8I8I8I8I8I8I8I8I8'
local RULE, REPLY, USAGE = '>I8I8I8I8I8I8I8I8I8I8I8I8I8',
	'>I8I8I8I8I8I8I8I8I8I8I8I8I8I8',
	'>I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8'
local HEADER = '>I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8'

local operation = ARGV[1]
local seq, void, prior, epoch, count, open, digest, arg1, arg2, arg3, arg4 = unpackAt(REQUEST, ARGV[2], 1)

-- The window's numbers, in w, as far as most calls need them.
local EPOCH, COUNT, NOW, DRIFT, LOSS, WINDOW, DIGEST, TURN, CHANGES = 1, 2, 3, 4, 5, 6, 7, 8, 9
local STOPPED, NOLOANS, OTHERS, TOLD, TOLDAT, CHARGED, WATCHED = 10, 11, 12, 13, 14, 15, 16
local PEAK, DEMAND, SUM = 16, 21, 24 -- of class c at PEAK+c (for the part under way) and DEMAND+c, of a log at SUM+log
local OWN_PEAK, OTHERS_PEAK = 4, 5

-- The logs are numbered: of class c, what is used is log c, and what was refused is log REFUSED+c. The newest charge of a
-- log stands by itself, the others in stretches of time, of which each is a field of the hash. Of a log, the numbers
-- at LEN+log and so on are: how many charges; when the oldest leaves; the instant and the tokens of the newest; and of
-- the oldest stretch, which it is, how many in it have left, and their tokens.
local LOGS, REFUSED = 6, 3
local LEN, NEXT, NEWEST, PENDING, FIRST, HEAD, BEFORE = 30, 36, 42, 48, 54, 60, 66

local PARTS = 12
local GRAINS, CROWDED, CHARGES = 600, 304, 608 -- as in internal/sliding

local time = call('TIME')
local clock = time[1] * 1000000 + time[2]

local class = operation == 'acquire' and arg1 + 1
local got = call('HMGET', KEYS[1], 'w', ARGV[4], 'log' .. (class or 0))
local w = got[1] and {unpackAt(HEADER, got[1], 1)}

-- A duplicate gets the answer of the original.
local last = got[2] and unpackAt(NUMBER, got[2], 1) or 0
if last > seq then return pack(NUMBER, STALE) end

local changed = {} -- fields of the hash: false is one that is not there any more

-- The rule, in tokens: window, pace, quota, quota and overdraft, the shares, the floors and the ceilings.
local rule = {unpackAt(RULE, ARGV[3], 1)}
local SHARE, FLOOR, CEILING = 4, 7, 10
local window, pace, quota, most = rule[1], rule[2], rule[3], rule[4]
if w and w[WINDOW] ~= window then return pack(CHARGE, OTHER_WINDOW, w[WINDOW]) end

local grain = math.ceil(window / GRAINS)
local part = math.ceil(window / PARTS)
local stretch = grain * 50 -- a window touches 13 of them at most

local now, new, disagree = clock, not w, 0
if new then
	w = {now, 0, now, 0, epoch == 0 and 0 or 1, window, digest, now - now % part + part, 0}
	for i = STOPPED, BEFORE + LOGS do w[i] = 0 end
	w[TOLD], w[WATCHED] = NEVER, NEVER
	for log = 1, LOGS do w[NEXT + log] = NEVER end
else
	-- The clock may be another server's. Set back, it stands still and goes on from there.
	now = clock + w[DRIFT]
	if now < w[NOW] then
		if (w[NOW] - now) * GRAINS > window then w[DRIFT] = w[DRIFT] + w[NOW] - now end
		now = w[NOW]
	end
	w[NOW] = now
	-- What a newer epoch, a later count or a later answer in this slot saw, and a failover lost, is somewhere in the last
	-- window. What an older epoch saw was charged before this one began.
	local unknown = last < prior
	if epoch > w[EPOCH] or epoch == w[EPOCH] and (count > w[COUNT] or unknown) then
		w[EPOCH], w[LOSS] = now, 1
	elseif epoch ~= 0 and epoch < w[EPOCH] then
		w[LOSS] = 1
	end
	disagree, w[DIGEST] = w[DIGEST] == digest and 0 or 1, digest
end

-- What most calls need: nothing has changed but the time, and the call fits. It is what follows, without its functions,
-- for to make these takes longer than to decide.
if class and now < w[CHANGES] and void == 0 and w[LOSS] == 0 and last < seq then
	local e, mine = arg2, w[SUM + class]
	local own = e <= rule[SHARE + class] - mine
	local left = (own and most or quota) - w[OTHERS]
	for d = 1, 3 do
		if d ~= class then
			local kept = rule[FLOOR + d]
			if not own then kept = kept + min(w[DEMAND + d], rule[SHARE + d] - kept) end
			left = max(left, 0) - max(w[SUM + d], kept)
		end
	end
	local ceiling = rule[CEILING + class]
	local fits = e <= left - mine and now >= w[own and STOPPED or NOLOANS] and (own or arg3 == 1 and e <= ceiling - mine and
		(pace == 1 or mine < floor(min(left, ceiling) / pace)))
	local len, leaves, newest, pending, first, head, before
	if fits then len, leaves, newest, pending, first, head, before = unpackAt(LOG, got[3], 1) end
	if fits and len < CHARGES then
		if len == 0 then
			len, leaves, pending = 1, now + window, e
		elseif now == newest or len >= CROWDED and now < newest - newest % grain + grain then
			pending = pending + e
			if len == 1 then leaves = now + window end
		else
			local s = floor(newest / stretch)
			local name = class .. ':' .. s
			local charges = len > 1 and call('HGET', KEYS[1], name)
			if len == 1 then first, head, before = s, 0, 0 end
			local total = charges and unpackAt(NUMBER, charges, #charges - 7) or 0
			changed[1], changed[2] = name, (charges or '') .. pack(CHARGE, newest, total + pending)
			len, pending = len + 1, e
		end
		local asked = min(mine + e + w[SUM + REFUSED + class], MAX)
		w[SUM + class] = mine + e
		w[PEAK + class], w[DEMAND + class] = max(w[PEAK + class], asked), max(w[DEMAND + class], asked)
		if w[WATCHED] < now then
			w[PEAK + OWN_PEAK] = max(w[PEAK + OWN_PEAK], min(w[SUM + 1] + w[SUM + 2] + w[SUM + 3], MAX))
		end
		w[CHARGED], w[COUNT] = min(w[CHARGED] + e, MAX), w[COUNT] + 1
		local reason = own and OWN or BORROWED
		call('HSET', KEYS[1], 'w', pack(HEADER, unpack(w, 1, 30)), ARGV[4], pack(ANSWER, seq, reason, now, 0, class, e),
			'log' .. class, pack(LOG, len, leaves, now, pending, first, head, before), unpack(changed))
		return pack(REPLY, DONE, reason, now, 0, w[EPOCH], w[COUNT], disagree, w[SUM + 1], w[SUM + 2], w[SUM + 3],
			w[DEMAND + 1], w[DEMAND + 2], w[DEMAND + 3], w[OTHERS])
	end
end

if not new then
	for log, packed in ipairs(call('HMGET', KEYS[1], 'log1', 'log2', 'log3', 'log4', 'log5', 'log6')) do
		w[LEN + log], w[NEXT + log], w[NEWEST + log], w[PENDING + log], w[FIRST + log], w[HEAD + log], w[BEFORE + log] =
			unpackAt(LOG, packed, 1)
	end
end
local touched = {} -- logs
local answered = last > 0 and {unpackAt(ANSWER, got[2], 1)}

-- Nothing is left this long after the last call, in milliseconds. A decision is sent again for less than ten seconds, and
-- a correction for less than a window.
local ttl = math.ceil((window + part) / 1000) + 10000

-- finish writes what was changed, remembers the answer, and returns it.
local recent = {0, 0, 0} -- of a usage; of "behind" the first is when so many fit within the share
local function finish(reason, at, wait, c, e)
	for log = 1, LOGS do
		if new or touched[log] then
			changed['log' .. log] = pack(LOG, w[LEN + log], w[NEXT + log], w[NEWEST + log], w[PENDING + log],
				w[FIRST + log], w[HEAD + log], w[BEFORE + log])
		end
	end
	local set = {'w', pack(HEADER, unpack(w, 1, 30)), ARGV[4], pack(ANSWER, seq, reason, at, wait, c, e)}
	for name, value in pairs(changed) do
		if value then
			set[#set + 1] = name
			set[#set + 1] = value
		else
			call('HDEL', KEYS[1], name)
		end
	end
	call('HSET', KEYS[1], unpack(set))
	call('PEXPIRE', KEYS[1], ttl)
	return pack(USAGE, DONE, reason, at, wait, w[EPOCH], w[COUNT], disagree, w[SUM + 1], w[SUM + 2], w[SUM + 3],
		w[DEMAND + 1], w[DEMAND + 2], w[DEMAND + 3], w[OTHERS], recent[1], recent[2], recent[3])
end

local function lost()
	finish(0, now, 0, 0, 0)
	return pack(ANSWER, LOST, w[EPOCH] + window - now, 0, 0, w[EPOCH], w[COUNT])
end

local function plus(a, b) return a > MAX - b and MAX or a + b end

local function charged() return plus(plus(w[SUM + 1], w[SUM + 2]), w[SUM + 3]) end

-- note brings the peaks up to a change of what the class has charged or asked for.
local function note(c)
	local asked = plus(w[SUM + c], w[SUM + REFUSED + c])
	w[PEAK + c] = max(w[PEAK + c], asked)
	w[DEMAND + c] = max(w[DEMAND + c], asked)
	if w[WATCHED] < now then w[PEAK + OWN_PEAK] = max(w[PEAK + OWN_PEAK], charged()) end
end

-- The log. A charge in a stretch is its instant and the running total of the stretch.

local fields = {} -- of the hash, as far as they were read
local views = {} -- what view returned

local function touch(log) views[log], touched[log] = nil, true end

local function put(log, s, charges)
	local name = log .. ':' .. s
	fields[name], changed[name] = charges, charges
end

local function get(log, s)
	local name = log .. ':' .. s
	if fields[name] == nil then fields[name] = call('HGET', KEYS[1], name) end
	return fields[name]
end

local function len(charges) return #charges / 16 end

local function charge(charges, i) return unpackAt(CHARGE, charges, i * 16 - 15) end

local function total(charges, i) return (unpackAt(NUMBER, charges, i * 16 - 7)) end

-- search returns the first i of lo..hi for which ok holds, and hi+1 if there is none; it looks at the lowest first.
local function search(lo, hi, ok)
	local from, step = lo, 1
	while from <= hi and not ok(from) do
		lo = from + 1
		from = from + step
		step = step * 2
	end
	hi = min(from, hi + 1)
	while lo < hi do
		local mid = floor((lo + hi) / 2)
		if ok(mid) then hi = mid else lo = mid + 1 end
	end
	return lo
end

-- A view of a log answers many questions while the log does not change: its stretches that hold charges, and the
-- tokens charged from each of its stretches on.
local function view(log)
	local v = views[log]
	if v then return v end
	local first, last = w[FIRST + log], floor(w[NEWEST + log] / stretch)
	local unread = {}
	for s = first, last do
		if fields[log .. ':' .. s] == nil then unread[#unread + 1] = log .. ':' .. s end
	end
	if #unread > 0 then
		local got = call('HMGET', KEYS[1], unpack(unread))
		for i, name in ipairs(unread) do fields[name] = got[i] end
	end
	v = {first = first, charges = {}, list = {}, from = {[last + 1] = w[PENDING + log]}}
	for s = last, first, -1 do
		local charges = fields[log .. ':' .. s]
		v.from[s] = v.from[s + 1]
		if charges then
			v.charges[s] = charges
			v.from[s] = v.from[s] + total(charges, len(charges)) - (s == first and w[BEFORE + log] or 0)
		end
	end
	for s = first, last do
		if v.charges[s] then v.list[#v.list + 1] = s end
	end
	views[log] = v
	return v
end

-- after returns the tokens that were charged after the instant t.
local function after(log, t)
	if t >= w[NEWEST + log] or w[LEN + log] == 0 then return 0 end
	if t < w[NEXT + log] - window then return w[SUM + log] end
	local v, s = view(log), floor(t / stretch)
	local charges = v.charges[s]
	if not charges then return v.from[s] end
	local n = len(charges)
	local i = search(1, n, function(i) return charge(charges, i) > t end)
	local before = s == v.first and w[BEFORE + log] or 0
	if i > 1 then before = total(charges, i - 1) end
	return v.from[s + 1] + total(charges, n) - before
end

-- leave drops the oldest stretch, and returns the charges of the next, if one is left.
local function leave(log)
	local s, charges = w[FIRST + log]
	put(log, s, false)
	if w[LEN + log] == 1 then
		w[NEXT + log] = w[NEWEST + log] + window
		return
	end
	repeat
		s = s + 1
		charges = get(log, s)
	until charges
	w[FIRST + log], w[HEAD + log], w[BEFORE + log] = s, 0, 0
	w[NEXT + log] = charge(charges, 1) + window
	return charges
end

-- expire drops what no longer counts.
local function expire(log)
	touch(log)
	if w[NEWEST + log] + window <= now then
		if w[LEN + log] > 1 then
			for s = w[FIRST + log], floor(w[NEWEST + log] / stretch) do put(log, s, false) end
		end
		w[LEN + log], w[SUM + log], w[NEXT + log], w[NEWEST + log] = 0, 0, NEVER, 0
		return
	end
	local charges = get(log, w[FIRST + log])
	while w[NEXT + log] <= now do
		local n, head = len(charges), w[HEAD + log]
		local i = search(head + 1, n, function(i) return charge(charges, i) + window > now end)
		local gone = total(charges, i - 1)
		w[LEN + log] = w[LEN + log] - (i - 1 - head)
		w[SUM + log] = w[SUM + log] - (gone - w[BEFORE + log])
		if i > n then
			charges = leave(log)
		else
			w[HEAD + log], w[BEFORE + log], w[NEXT + log] = i - 1, gone, charge(charges, i) + window
		end
	end
end

-- forget takes tokens, no more than there are, from the oldest charges.
local function forget(log, tokens)
	touch(log)
	w[SUM + log] = w[SUM + log] - tokens
	local charges = w[LEN + log] > 1 and get(log, w[FIRST + log])
	while charges do
		local n, head, before = len(charges), w[HEAD + log], w[BEFORE + log]
		local i = search(head + 1, n, function(i) return total(charges, i) - before >= tokens end)
		w[LEN + log] = w[LEN + log] - (i - 1 - head)
		if i <= n then -- what is left begins anew, so that no total passes 2^53
			local numbers = 2 * (n - i + 1)
			local form = '>' .. rep('I8', numbers)
			local left = {unpackAt(form, charges, i * 16 - 15)}
			for k = 2, numbers, 2 do left[k] = left[k] - (before + tokens) end
			put(log, w[FIRST + log], pack(form, unpack(left, 1, numbers)))
			w[HEAD + log], w[BEFORE + log], w[NEXT + log] = 0, 0, left[1] + window
			return
		end
		tokens = tokens - (total(charges, n) - before)
		charges = leave(log)
	end
	w[PENDING + log] = w[PENDING + log] - tokens
end

local function grainEnd(at) return at - at % grain + grain end

-- merge makes one charge of those in each grain.
local function merge(log)
	local v = view(log)
	touch(log)
	w[LEN + log], w[HEAD + log] = 1, 0
	for _, s in ipairs(v.list) do
		local charges, kept, edge = v.charges[s], {}, 0
		local before, last = s == v.first and w[BEFORE + log] or 0, 0
		for i = s == v.first and w[HEAD + log] + 1 or 1, len(charges) do
			local at, tokens = charge(charges, i)
			if at >= edge then
				edge = grainEnd(at)
				kept[#kept + 1] = ''
				before = last > 0 and last or before
			end
			kept[#kept], last = pack(CHARGE, at, tokens), tokens
		end
		if w[NEWEST + log] < edge then -- the last of these is in the grain of the newest
			kept[#kept] = nil
			w[PENDING + log] = w[PENDING + log] + last - before
		end
		put(log, s, #kept > 0 and table.concat(kept))
		w[LEN + log] = w[LEN + log] + #kept
	end
	w[NEXT + log] = charge(get(log, v.first), 1) + window -- of 608 charges some stay apart
end

-- replace makes the charge of from tokens that was made at the instant at, and still counts, one of to tokens.
local function replace(log, at, from, to)
	if w[LEN + log] == 0 or at > w[NEWEST + log] then return end
	touch(log)
	local room = MAX - w[SUM + log]
	local s = floor(at / stretch)
	local charges = w[LEN + log] > 1 and get(log, s)
	if charges then
		local first, n = s == w[FIRST + log], len(charges)
		local i = search(first and w[HEAD + log] + 1 or 1, n, function(i) return charge(charges, i) >= at end)
		if i <= n then
			local before = i > 1 and total(charges, i - 1) or 0
			local change = min(max(to - from, before - total(charges, i)), room)
			local numbers = 2 * (n - i + 1)
			local form = '>' .. rep('I8', numbers)
			local tail = {unpackAt(form, charges, i * 16 - 15)}
			for k = 2, numbers, 2 do tail[k] = tail[k] + change end
			put(log, s, sub(charges, 1, i * 16 - 16) .. pack(form, unpack(tail, 1, numbers)))
			w[SUM + log] = w[SUM + log] + change
			return
		end
	end
	if s == floor(w[NEWEST + log] / stretch) then
		local change = min(max(to - from, -w[PENDING + log]), room)
		w[PENDING + log], w[SUM + log] = w[PENDING + log] + change, w[SUM + log] + change
	end
end

-- The peaks: p[12*(k-1)+i] is what the peak k was i parts ago; what it is for the part under way is w[PEAK+k].
local PEAKS = '>' .. rep('I8', 5 * PARTS)
local p
local function peaks()
	if not p then
		local packed = call('HGET', KEYS[1], 'peaks')
		p = packed and {unpackAt(PEAKS, packed, 1)} or {}
		for i = #p + 1, 5 * PARTS do p[i] = 0 end
	end
	return p
end

-- maxAfter returns the highest value of a peak that is still remembered after so many more turns.
local function maxAfter(k, turns)
	local highest = 0
	if turns <= PARTS then
		highest = w[PEAK + k]
		local past = peaks()
		for i = 1, PARTS - turns do highest = max(highest, past[PARTS * (k - 1) + i]) end
	end
	return highest
end

local function askedAt(c, t)
	return plus(after(c, t - window), after(REFUSED + c, t - window))
end

-- add charges tokens now.
local function add(log, tokens)
	local n, newest = w[LEN + log], w[NEWEST + log]
	touch(log)
	w[SUM + log], w[NEWEST + log] = w[SUM + log] + tokens, now
	if n > 0 and (now == newest or n >= CROWDED and now < grainEnd(newest)) then
		w[PENDING + log] = w[PENDING + log] + tokens
		if n == 1 then w[NEXT + log] = now + window end
		return
	end
	if n == 0 then
		w[NEXT + log] = now + window
	else -- the newest is so no longer
		w[NEWEST + log] = newest
		if n >= CHARGES then merge(log) end
		local s, charges, before = floor(newest / stretch), nil, 0
		if w[LEN + log] > 1 then
			charges = get(log, s)
			before = charges and total(charges, len(charges)) or 0
		else
			w[FIRST + log], w[HEAD + log], w[BEFORE + log] = s, 0, 0
		end
		put(log, s, (charges or '') .. pack(CHARGE, newest, before + w[PENDING + log]))
		w[NEWEST + log] = now
	end
	w[LEN + log], w[PENDING + log] = w[LEN + log] + 1, tokens
end

-- Bring the window to the present.
if now >= w[TURN] then
	local past = peaks()
	local function turn(k, value)
		for i = PARTS, 2, -1 do past[PARTS * (k - 1) + i] = past[PARTS * (k - 1) + i - 1] end
		past[PARTS * (k - 1) + 1] = w[PEAK + k]
		w[PEAK + k] = value
	end
	local missed = floor((now - w[TURN]) / part) - PARTS
	if missed > 0 then w[TURN] = w[TURN] + missed * part end
	while w[TURN] <= now do
		local own = 0
		for c = 1, 3 do
			own = plus(own, after(c, w[TURN] - window))
			turn(c, askedAt(c, w[TURN]))
		end
		turn(OWN_PEAK, own)
		turn(OTHERS_PEAK, 0)
		w[TURN] = w[TURN] + part
	end
	changed.peaks = pack(PEAKS, unpack(past, 1, 5 * PARTS))
	for c = 1, 3 do w[DEMAND + c] = maxAfter(c, 0) end
	w[OTHERS] = maxAfter(OTHERS_PEAK, 0)
	w[CHANGES] = now

	-- Slots that were not used for as long as the window would be kept are forgotten, some at a time: all are looked at
	-- in a window, however many there are.
	local some = max(100, math.ceil(call('HLEN', KEYS[1]) / (PARTS / 2)))
	local swept = call('HSCAN', KEYS[1], call('HGET', KEYS[1], 'swept') or '0', 'MATCH', 'slot:*', 'COUNT', some)
	changed.swept = swept[1]
	for i = 1, #swept[2], 2 do
		local _, _, at = unpackAt(ANSWER, swept[2][i + 1], 1)
		if at + ttl * 1000 < now and swept[2][i] ~= ARGV[4] then changed[swept[2][i]] = false end
	end
end
if now >= w[CHANGES] then
	w[CHANGES] = w[TURN]
	for log = 1, LOGS do
		if w[NEXT + log] <= now then expire(log) end
		w[CHANGES] = min(w[CHANGES], w[NEXT + log])
	end
end

-- A duplicate. That there was no decision is none to repeat.
local again = last == seq
if again and class and answered[2] > 0 then return finish(unpack(answered, 2, 6)) end

-- settle replaces a charge that still counts.
local function settle(c, at, from, to)
	if now - at < window and at >= w[EPOCH] then
		replace(c, at, from, to)
		note(c)
	end
end

-- Nobody waited for the answer to an earlier request in this slot: what it charged is given back. If it comes only now,
-- it is stale.
if void > 0 and last >= void and answered[5] > 0 then settle(answered[5], answered[3], answered[6], 0) end

-- The usage was lost: what was charged before the epoch leaves within a window of its beginning. Until then nobody
-- knows how much there is.
if w[LOSS] == 1 then
	if now >= w[EPOCH] + window then
		w[LOSS] = 0
	elseif open == 0 and operation ~= 'correct' then
		return lost()
	end
end

if operation == 'correct' then
	local SETTLE, ADD, OBSERVE, THROTTLED = 0, 1, 2, 3
	if not again then w[COUNT] = w[COUNT] + 1 end
	for i = 7 * 8 + 1, again and 0 or #ARGV[2] - 39, 5 * 8 do
		local kind, c, at, from, to = unpackAt(CORRECTION, ARGV[2], i)
		if kind == SETTLE then
			settle(c + 1, at, from, to)
		elseif kind == ADD then
			add(c + 1, min(to, MAX - w[SUM + c + 1]))
			note(c + 1)
		elseif kind == THROTTLED then
			w[STOPPED] = max(w[STOPPED], now + to)
			w[NOLOANS] = max(w[STOPPED], now + window)
		elseif kind == OBSERVE and from < window then
			local remaining, sent = to, from
			local cached = remaining == w[TOLD] and w[CHARGED] - w[TOLDAT] > min(1000, floor(quota / 100))
			if remaining ~= w[TOLD] then w[TOLD], w[TOLDAT] = remaining, w[CHARGED] end
			if not cached then
				if w[WATCHED] == NEVER then w[WATCHED] = now - 1 end
				w[PEAK + OWN_PEAK] = max(w[PEAK + OWN_PEAK], charged())
				local parts, began = 1, w[TURN] - part
				if sent > now - began then parts = parts + math.ceil((sent - (now - began)) / part) end
				local turns = PARTS + 1 - min(parts, PARTS + 1)
				local own = maxAfter(OWN_PEAK, turns)
				if now - sent <= w[WATCHED] then
					local asked = 0
					for c = 1, 3 do asked = plus(asked, maxAfter(c, turns)) end
					own = max(own, asked)
				end
				local others = quota - remaining - own
				w[PEAK + OTHERS_PEAK] = max(w[PEAK + OTHERS_PEAK], others)
				w[OTHERS] = max(w[OTHERS], others)
			end
		end
	end
	if w[LOSS] == 1 and open == 0 then return lost() end -- they are done, but there is no usage to tell
	return finish(0, now, 0, 0, 0)
end

-- The rule.

local NONE = {0, 0, 0}
local used = {w[SUM + 1], w[SUM + 2], w[SUM + 3]}
local demand = {w[DEMAND + 1], w[DEMAND + 2], w[DEMAND + 3]}

-- rest returns what is left of total for class c when each other class takes what it uses, or what is kept for it if
-- that is more.
local function rest(total, c, u, others, kept, from)
	total = total - others
	for d = 1, 3 do
		if d ~= c then total = max(total, 0) - max(u[d], kept[from + d]) end
	end
	return max(total, 0)
end

-- judge is the rule but for the pace. For a loan it also returns what the class may hold, borrowed or not.
local function judge(c, e, u, lately, others)
	local mine = u[c]
	if e <= rule[SHARE + c] - mine then
		if e <= rest(most, c, u, others, rule, FLOOR) - mine then return OWN end
		if e <= rest(most, c, u, others, NONE, 0) - mine then return RESERVED end
		return FULL
	end
	local held = {}
	for d = 1, 3 do held[d] = rule[FLOOR + d] + min(lately[d], rule[SHARE + d] - rule[FLOOR + d]) end
	local holdable = rest(quota, c, u, others, held, 0)
	if e > holdable - mine then
		if e <= rest(quota, c, u, others, NONE, 0) - mine then return RESERVED end
		return FULL
	end
	if e > rule[CEILING + c] - mine then return CAPPED end
	return BORROWED, min(holdable, rule[CEILING + c])
end

-- tooFast returns the lowest recent pace that is too fast.
local function tooFast(holdable)
	local over = math.fmod(holdable, pace)
	return (holdable - over) / pace + (over > 0 and 1 or 0)
end

local function span(k) return math.ceil(window * k / pace) end

-- pacedAt reports whether Recent will be at least the limit at t, if nothing is charged until then.
local function pacedAt(log, t, limit)
	local highest = w[SUM + log]
	for k = pace, 1, -1 do
		if highest >= limit * k then
			highest = after(log, t - span(k))
			if highest >= limit * k then return true end
		end
	end
	return false
end

-- fits applies the rule to the present.
local function fits(c, e)
	local reason, holdable = judge(c, e, used, demand, w[OTHERS])
	if now < w[NOLOANS] and (reason == BORROWED or reason == OWN and now < w[STOPPED]) then return FULL end
	if reason == BORROWED and pace > 1 then
		local limit = tooFast(holdable)
		if used[c] >= limit then
			if pacedAt(c, now, limit) then return PACED end
		end
	end
	return reason
end

local e, reason = arg2
if class then
	reason = fits(class, e)
	if arg3 == 0 and e > rule[SHARE + class] - used[class] then reason = QUEUED end -- it may have no loan
	if reason <= BORROWED then
		add(class, e)
		note(class)
		w[CHARGED], w[COUNT] = plus(w[CHARGED], e), w[COUNT] + 1
		return finish(reason, now, 0, class, e)
	end
end

-- When to come back. See Window.fitsAt for why a list of instants can be searched.

local function turnsAt(t) return floor((t - w[TURN]) / part) + 1 end
local function turnAt(n) return w[TURN] + n * part end

local function usageAt(t)
	local u, lately, others = {}, {}, w[OTHERS]
	for c = 1, 3 do u[c], lately[c] = after(c, t - window), demand[c] end
	if t >= w[TURN] then
		local turns = turnsAt(t)
		others = maxAfter(OTHERS_PEAK, turns)
		for c = 1, 3 do
			lately[c] = turns <= PARTS and maxAfter(c, turns) or askedAt(c, turnAt(turns - PARTS - 1))
		end
	end
	return u, lately, others
end

local function willFit(c, e, t, loan)
	local u, lately, others = usageAt(t)
	local reason, holdable = judge(c, e, u, lately, others)
	if reason == OWN then return t >= w[STOPPED] end
	return reason == BORROWED and loan and t >= w[NOLOANS] and
		(pace == 1 or not pacedAt(c, t, tooFast(holdable)))
end

-- firstLeaving returns the first instant before limit at which a charge stops counting and ok holds, and limit if there
-- is none.
local function firstLeaving(log, limit, ok)
	if w[LEN + log] > 1 then
		local v = view(log)
		local function late(charges, i)
			local leaves = charge(charges, i) + window
			return leaves >= limit or ok(leaves)
		end
		local n = search(1, #v.list, function(n)
			local charges = v.charges[v.list[n]]
			return late(charges, len(charges))
		end)
		local charges = v.charges[v.list[n]]
		if charges then
			local i = search(n == 1 and w[HEAD + log] + 1 or 1, len(charges) - 1, function(i) return late(charges, i) end)
			return min(charge(charges, i) + window, limit)
		end
	end
	local leaves = w[NEWEST + log] + window
	return w[LEN + log] > 0 and leaves < limit and ok(leaves) and leaves or limit
end

-- slows returns the first instant at which Recent is below the limit, if nothing is charged until then.
local function slows(log, limit)
	local v, at = w[LEN + log] > 1 and view(log), 0
	for k = 1, pace do
		local tokens = limit * k
		if tokens <= w[PENDING + log] then
			at = max(at, w[NEWEST + log] + span(k))
		elseif tokens <= w[SUM + log] then -- the charge with which the newest ones are so many
			local n = search(1, #v.list, function(n) return v.from[v.list[n] + 1] < tokens end)
			local s = v.list[n]
			local charges, later = v.charges[s], v.from[s + 1]
			local all = total(charges, len(charges))
			local i = search(s == v.first and w[HEAD + log] + 1 or 1, len(charges), function(i)
				return later + all - total(charges, i) < tokens
			end)
			at = max(at, charge(charges, i) + span(k))
		end
	end
	return at
end

local function fitsAt(c, e, loan)
	local function ok(t) return willFit(c, e, t, loan) end
	local first = turnAt(2 * PARTS)
	for c = 1, 3 do first = firstLeaving(c, first, ok) end
	for _, t in ipairs({w[STOPPED], w[NOLOANS]}) do
		if t > now and t < first and ok(t) then first = t end
	end
	local own = not loan or e <= rule[SHARE + c] - used[c]
	if own and w[OTHERS] == 0 then return first end
	if first > w[TURN] then
		local before = floor((first - 1 - w[TURN]) / part)
		if ok(turnAt(before)) then
			first = turnAt(search(0, before - 1, function(n) return ok(turnAt(n)) end))
		end
	end
	if own or pace == 1 or first <= w[NOLOANS] then return first end
	local reason, holdable = judge(c, e, usageAt(first - 1))
	if reason == BORROWED then first = min(first, slows(c, tooFast(holdable))) end
	return first
end

if class then
	local wait = fitsAt(class, e, reason ~= QUEUED) - now
	local log, asked = REFUSED + class, arg4
	if asked > 0 and reason ~= QUEUED then
		local over = asked - (MAX - w[SUM + log])
		if over > 0 then forget(log, over) end
		add(log, asked)
		note(class)
	end
	return finish(reason, now, wait, 0, 0)
end

if operation == 'behind' then -- when so many tokens fit as one call, and when so many fit within the share
	local c, wait = arg1 + 1, 0
	if arg3 == 0 or not willFit(c, e, now, true) then wait = fitsAt(c, e, true) - now end
	if arg4 > 0 then recent[1] = fitsAt(c, arg4, false) - now end
	return finish(0, now, wait, 0, 0)
end

-- The usage.
for c = 1, 3 do
	for k = 1, pace do recent[c] = max(recent[c], floor(after(c, now - span(k)) / k)) end
end
return finish(0, now, 0, 0, 0)
