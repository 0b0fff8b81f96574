package promshare

const (
	ownSeries    = 89
	sharedSeries = 101
)
