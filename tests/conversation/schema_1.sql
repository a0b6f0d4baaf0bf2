PRAGMA user_version=1;
BEGIN TRANSACTION;
CREATE TABLE conversations (
    id TEXT PRIMARY KEY,
    title TEXT NOT NULL,
    model TEXT NOT NULL,
    created_s REAL NOT NULL,
    updated_s REAL NOT NULL
);
INSERT INTO "conversations" VALUES('bae6196ccd3b7e42','Toss a coin','smollm2-135m-instruct',1.79533399987163519865e+09,1795333999.89093);
INSERT INTO "conversations" VALUES('36598491ad6699df','too long','other',1.79533399989114689828e+09,1.79533399989219236373e+09);
INSERT INTO "conversations" VALUES('be90d526c20582cc','too long','other',1.79533399989231777192e+09,1.7953339998930394649e+09);
INSERT INTO "conversations" VALUES('95a681586339c266','asked and never answered','m',1.7953339998931670189e+09,1.79533399989326930045e+09);
INSERT INTO "conversations" VALUES('8eb4fab4c1fce33a','empty','m',1.7953339998934431076e+09,1.7953339998934431076e+09);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    conversation_id TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
    role TEXT NOT NULL,
    content TEXT NOT NULL,
    reasoning TEXT,
    meta TEXT NOT NULL DEFAULT '{}',
    complete INTEGER NOT NULL DEFAULT 1,
    created_s REAL NOT NULL
);
INSERT INTO "messages" VALUES(1,'bae6196ccd3b7e42','system','Be brief',NULL,'{}',1,1.79533399987180161475e+09);
INSERT INTO "messages" VALUES(2,'bae6196ccd3b7e42','user','Toss a coin',NULL,'{}',1,1.79533399987210750582e+09);
INSERT INTO "messages" VALUES(3,'bae6196ccd3b7e42','assistant','on its edge','','{"model": "smollm2-135m-instruct", "finish_reason": "stop", "prompt_tokens": 11, "completion_tokens": 4, "earlier": [{"content": "heads", "reasoning": "fair coin", "meta": {"model": "smollm2-135m-instruct", "finish_reason": "stop", "prompt_tokens": 11, "completion_tokens": 4}}, {"content": "tails", "reasoning": "", "meta": {"model": "smollm2-135m-instruct", "finish_reason": "stop", "prompt_tokens": 11, "completion_tokens": 4}}]}',1,1.79533399987232494352e+09);
INSERT INTO "messages" VALUES(4,'bae6196ccd3b7e42','user','File notes.txt:
````txt
täglich
```
x
```
````

And now?',NULL,'{"typed": "And now?", "attached": ["notes.txt"]}',1,1.79533399987346029284e+09);
INSERT INTO "messages" VALUES(5,'bae6196ccd3b7e42','assistant','again heads','','{"model": "smollm2-135m-instruct", "finish_reason": "stop", "prompt_tokens": 11, "completion_tokens": 4}',1,1.79533399989000964167e+09);
INSERT INTO "messages" VALUES(6,'bae6196ccd3b7e42','system','Answer in rhyme',NULL,'{}',1,1.79533399989048767092e+09);
INSERT INTO "messages" VALUES(7,'bae6196ccd3b7e42','user','日本語の質問です 👩‍👩‍👧 עברית',NULL,'{}',1,1.79533399989070320133e+09);
INSERT INTO "messages" VALUES(8,'bae6196ccd3b7e42','assistant','half an answ','','{"model": "smollm2-135m-instruct"}',0,1795333999.89093);
INSERT INTO "messages" VALUES(9,'36598491ad6699df','user','too long','','{"failed": true, "compact": true}',1,1.79533399989125657088e+09);
INSERT INTO "messages" VALUES(10,'36598491ad6699df','user','it''s 100% humid; "quoted"',NULL,'{}',1,1.79533399989162302011e+09);
INSERT INTO "messages" VALUES(11,'36598491ad6699df','assistant','line one
line two;

CREATE TABLE x(y);','','{"model": "other", "finish_reason": "stopped", "prompt_tokens": 11, "completion_tokens": 4, "estimated": true}',1,1.7953339998918278217e+09);
INSERT INTO "messages" VALUES(12,'be90d526c20582cc','user','too long','','{"failed": true, "compact": true}',1,1.7953339998924233913e+09);
INSERT INTO "messages" VALUES(13,'be90d526c20582cc','user','the edited one',NULL,'{}',1,1.79533399989261841771e+09);
INSERT INTO "messages" VALUES(14,'be90d526c20582cc','assistant','fine','','{"model": "other", "finish_reason": "stop", "prompt_tokens": 11, "completion_tokens": 4}',1,1.7953339998928282261e+09);
INSERT INTO "messages" VALUES(15,'95a681586339c266','user','asked and never answered',NULL,'{}',1,1.79533399989326930045e+09);
CREATE INDEX messages_of ON messages(conversation_id, id);
CREATE INDEX by_age ON conversations(updated_s DESC);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('messages',15);
COMMIT;
