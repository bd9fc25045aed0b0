// Package kueuetest gives tests the real Kueue manager and the types that they meet there. What starts it, and how, is in
// internal/kueuemanager.
package kueuetest
