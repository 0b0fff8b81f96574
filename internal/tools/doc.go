// Package tools holds what watches over the repository as a whole: its tests are run by make guard, and its go.mod pins
// the tools of make lint.
package tools
