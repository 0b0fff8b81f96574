// Package sdktest tests llmhttp under the SDKs of OpenAI and of Anthropic, against a server that counts as they do. It
// is a module of its own, so that the SDKs are no dependencies of the library.
package sdktest
